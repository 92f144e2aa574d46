"""A reward of one's own: the right answer, in as few words as possible.

The service runs this file in a sandbox, and calls `reward` once a reply: with the prompt's line of
the JSONL file and with what the policy said.
"""


def reward(prompt: dict, reply: str) -> dict:
    is_right = reply.strip().endswith(f"Answer: {prompt['answer']}")
    brevity = max(0.0, 1.0 - len(reply) / 60)
    return {"reward": is_right * (0.5 + 0.5 * brevity), "success": is_right}
