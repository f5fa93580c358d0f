"""From the model name in a request to the replica that runs it: selection, admission, replica choice, failover."""
