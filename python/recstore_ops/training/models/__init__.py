"""Models over tables, of clicks and for retrieval: plain PyTorch, each in a file of its own, to import or to copy."""

from recstore_ops.training.models.dcn import DCN
from recstore_ops.training.models.deepfm import DeepFM
from recstore_ops.training.models.din import DIN
from recstore_ops.training.models.dlrm import DLRM
from recstore_ops.training.models.factorization_machine import FactorizationMachine
from recstore_ops.training.models.logistic_regression import LogisticRegression
from recstore_ops.training.models.two_tower import TwoTower
from recstore_ops.training.models.wide_and_deep import WideAndDeep

__all__ = ["DCN", "DIN", "DLRM", "DeepFM", "FactorizationMachine", "LogisticRegression", "TwoTower", "WideAndDeep"]
