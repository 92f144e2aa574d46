"""Every error that MARLaaS raises on purpose, as one tree.

    MarlaasError
    |-- InvalidRequest        the caller can put it right; says what would be right
    |   |-- UnsupportedBase   a base model whose numbers we could not vouch for
    |   `-- UnsupportedFeature  a setting that this backend cannot honour
    |-- Unauthorized          no key, an unknown one, or one that may not do this
    |   `-- Forbidden         the key is known; what it asks for is for another role
    |-- NotFound              no such thing, or another tenant's: the two look alike
    |   `-- Expired           there was one, and its result is not kept: ask anew
    |-- Conflict              the thing exists in another state than the caller thinks
    |-- QuotaExceeded         over a limit of the tenant
    |-- CapacityExceeded      over a limit of the machine (KV tokens, slots)
    |-- TooLarge              a body or an archive over the operator's limit
    |-- EnvironmentFailure    an environment or sandbox failed: typed data, never reward 0
    |-- WorkerLost            an engine process went away; its work is retried
    |-- StoreUnavailable      the database or its disk cannot take the call; nothing is half-written
    |-- PolicyDiverged        one policy's update or gap is not to be trusted; that job is held
    `-- Unreachable           a client found no service at the address, or lost it for good

A broken invariant is an `AssertionError` and ends the process; the store brings it back.
"""

from enum import StrEnum


class MarlaasError(Exception):
    """Base of every error raised on purpose. `code` is stable and meant for programs."""

    code = "error"


class InvalidRequest(MarlaasError):
    """The request cannot be honoured as written; `problems` names every fault at once."""

    code = "invalid_request"

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UnsupportedBase(InvalidRequest):
    """The base model has a part that our forward passes do not reproduce exactly."""

    code = "unsupported_base"


class UnsupportedFeature(InvalidRequest):
    """The backend in use lacks a capability that the request needs."""

    code = "unsupported_feature"


class Unauthorized(MarlaasError):
    """The request has no key, one that is not known, or one that may not do this."""

    code = "unauthorized"


class Forbidden(Unauthorized):
    """The key is good, and for another role."""

    code = "forbidden"


class NotFound(MarlaasError):
    """No such object for this tenant."""

    code = "not_found"


class Expired(NotFound):
    """The result is not kept any more, or went with the process that held it: ask anew."""

    code = "expired"


class Conflict(MarlaasError):
    """The object is in a state that forbids the request."""

    code = "conflict"


class QuotaExceeded(MarlaasError):
    """A limit of the tenant is reached; trying again after `retry_after_s` may succeed."""

    code = "quota_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CapacityExceeded(MarlaasError):
    """The request is larger than this machine's budget, whatever else runs."""

    code = "capacity_exceeded"


class TooLarge(MarlaasError):
    """What is sent, or asked for, is larger than the operator allows."""

    code = "too_large"


class FailureKind(StrEnum):
    """Why an environment could not give a verdict."""

    ERROR = "environment_error"
    """The environment's own code raised."""
    TIMEOUT = "tool_timeout"
    """A call took longer than its time limit."""
    SANDBOX_LIMIT = "sandbox_limit"
    """Memory, processes, output or files ran over the sandbox's limit."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox process itself died; the call may be retried."""


class EnvironmentFailure(MarlaasError):
    """The environment failed, as opposed to the policy. The trajectory records `kind`."""

    code = "environment_failure"

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind
        self.reason = message


class WorkerLost(MarlaasError):
    """The engine process that held the work has ended."""

    code = "worker_lost"


class StoreUnavailable(MarlaasError):
    """The database or its disk refused: full, read-only, locked, lost or damaged.

    Nothing of the call was written; once the cause is gone the same call may be made again.
    """

    code = "store_unavailable"


class PolicyDiverged(MarlaasError):
    """Non-finite values, or a sampler-trainer gap past its bound, in one policy."""

    code = "policy_diverged"


class Unreachable(MarlaasError):
    """A client could not reach the service, or lost it and did not find it again."""

    code = "unreachable"
