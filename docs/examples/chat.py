"""Ask a model that writes text, whole and part by part, and say what the gateway did for it.

python docs/examples/chat.py http://127.0.0.1:8000 smollm2 "Name three colours."
"""

import sys

from tidegate import Tidegate
from tidegate.outcome import Overloaded, ServeError


def main(url: str, model: str, question: str) -> None:
    with Tidegate(url, budget_s=20.0) as client:
        try:
            answer = client.chat(model, question, wanted={"max_tokens": 32, "temperature": 0})
        except Overloaded as refusal:  # after three tries that waited as long as they were told
            sys.exit(f"full; come back in {refusal.retry_after_s} s")
        except ServeError as error:
            sys.exit(f"{error.code}: {error}")
        print(answer.text)
        print(f"by {answer.served.by} ({answer.served.reason}), {answer.served.budget_left_s:.1f} s left")

        with client.stream_chat(model, question, wanted={"max_tokens": 32, "temperature": 0}, ttft_s=0.5) as stream:
            for text in stream:
                print(text, end="", flush=True)
        print(f"\n{stream.answer().usage['completion_tokens']} tokens by {stream.served.by}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
