from specbench.decoding.verify.base import (
    DRAFT,
    EMITTED,
    NEXT,
    VERIFY,
    Case,
    Draft,
    Verification,
    VerificationResult,
    one_hot,
)
from specbench.decoding.verify.token import TokenWise

__all__ = [
    "DRAFT",
    "EMITTED",
    "NEXT",
    "VERIFY",
    "Case",
    "Draft",
    "TokenWise",
    "Verification",
    "VerificationResult",
    "one_hot",
]
