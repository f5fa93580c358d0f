"""The helpers of the Anthropic SDK: tool_runner, whole and streamed, parse, an answer that is begun, a batch.
Arguments: base URL, model, and `batch` for a batch only."""

import json
import sys
import time

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

url, model = sys.argv[1:3]
client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
question = {"role": "user", "content": "What is the weather in Paris?"}


@beta_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"It rains in {city}."


class Answer(BaseModel):
    city: str
    wet: bool


def batch() -> dict:
    requests = [
        {
            "custom_id": f"r{number}",
            "params": {
                "model": model,
                "max_tokens": 8,
                "messages": [{"role": "user", "content": f"Say {number}."}],
            },
        }
        for number in range(4)
    ]
    requests[3]["params"]["temperature"] = 9
    made = client.messages.batches.create(requests=requests)
    while made.processing_status != "ended":
        time.sleep(0.2)
        made = client.messages.batches.retrieve(made.id)
    results = {line.custom_id: line.result.type for line in client.messages.batches.results(made.id)}
    listed = [one.id for one in client.messages.batches.list(limit=1)]
    client.messages.batches.delete(made.id)
    return {"results": results, "listed": made.id in listed, "counts": made.request_counts.model_dump()}


def helpers() -> dict:
    common = {"model": model, "max_tokens": 200, "messages": [question]}
    ran = client.beta.messages.tool_runner(tools=[weather], **common).until_done()
    reasons = [
        stream.get_final_message().stop_reason
        for stream in client.beta.messages.tool_runner(tools=[weather], stream=True, **common)
    ]
    parsed = client.messages.parse(output_format=Answer, **common).parsed_output
    begun = client.messages.create(**{**common, "messages": [question, {"role": "assistant", "content": "It is"}]})
    return {
        "ran": ran.content[0].text,
        "reasons": reasons,
        "parsed": parsed.model_dump(),
        "begun": begun.content[0].text,
    }


print(json.dumps(batch() if sys.argv[3:] else helpers()))
