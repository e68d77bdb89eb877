"""An agent loop through the `openai` client: the model may call a function until it answers.

python examples/agent.py [BASE_URL]     # without one, a server is started for the time being
"""

import json
import re
import subprocess
import sys

import openai

TOOL = {"type": "function", "function": {
    "name": "count_words", "description": "Count the words of a text.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}}  # fmt: skip
FUNCTIONS = {"count_words": lambda text="": len(text.split())}


def answer(client, model, question, max_rounds=4):
    messages = [{"role": "user", "content": question}]
    for _ in range(max_rounds):
        message = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], max_tokens=40, seed=1
        ).choices[0].message  # fmt: skip
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return message.content


def main(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        question = "How many words has 'Once upon a time'?"
        print(question, answer(client, model, question), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        command = [sys.executable, "-m", "aprefetch", "serve", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            found = (re.search(r"http://\S+", line) for line in server.stderr)
            main(next(url[0] for url in found if url))
            server.terminate()
