"""The log pipeline: a consumer that moves the request log from Kafka to ClickHouse, each entry exactly once."""
