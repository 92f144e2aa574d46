"""A reward of one's own: the reply should be the given word, and nothing else.

The service runs this file in a sandbox, and calls `reward` once a reply: with the prompt's line of
the JSONL file and with what the policy said.
"""


def reward(prompt: dict, reply: str) -> dict:
    wanted, said = prompt["word"], reply.strip()
    is_same = said == wanted
    shared = len(set(said) & set(wanted)) / max(1, len(set(said) | set(wanted)))
    return {"reward": 1.0 if is_same else 0.5 * shared, "success": is_same}
