from specbench.decoding.verify.base import DRAFT, EMITTED, NEXT, VERIFY, Case, Draft, Verdict, Verification, one_hot
from specbench.decoding.verify.token import TokenWise

__all__ = ["DRAFT", "EMITTED", "NEXT", "VERIFY", "Case", "Draft", "TokenWise", "Verdict", "Verification", "one_hot"]
