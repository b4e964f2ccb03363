"""Every function of torch on what stands for a table: as over a matrix of `nn.Embedding`, or refused by a sentence.

A release of torch with a function of another kind makes this fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import overridable
import pytest
import torch

pytestmark = pytest.mark.tier("test")

_TEXT = "says what the object is"
_MEMORY = "is about the memory that the object itself has"
_NO_TENSOR = "takes no tensor, and torch's own error says so"
_GPU_ONLY = "is of a GPU, and torch's own error says so"
ALWAYS = {"torch.autocast": _NO_TENSOR, "torch.Tensor.__repr__": _TEXT, "torch.Tensor.__format__": _TEXT}
OF_SCALARS = {
    **ALWAYS,
    "torch.Tensor.record_stream": _GPU_ONLY,
    "torch.Tensor.__cuda_array_interface__.__get__": _GPU_ONLY,
    "torch.Tensor.untyped_storage": _MEMORY,
}
OF_PARAMETERS = {
    **OF_SCALARS,
    **dict.fromkeys(
        ("torch.Tensor.register_hook", "torch.Tensor.register_post_accumulate_grad_hook"),
        "takes a hook, of which test_parameter_idioms.py has the calls",
    ),
}
EXPLAINED: dict[str, dict[str, str]] = {
    "parameter": OF_PARAMETERS,
    "parameter, under no_grad": {**OF_PARAMETERS, "torch.Tensor._version.__get__": _MEMORY},
    "data": OF_SCALARS,
    "grad": OF_SCALARS,
    "value in a state": {
        **{name: reason for name, reason in ALWAYS.items() if reason is _TEXT},
        **dict.fromkeys(("torch.empty_like", "torch.fbgemm_pack_gemm_matrix_fp16"), "gives memory that nobody filled"),
        **{
            f"torch.Tensor.{name}": _MEMORY
            for name in ("const_data_ptr", "data_ptr", "storage", "untyped_storage", "_cdata.__get__", "__dlpack__")
        },
        "torch.Tensor._version.__get__": _MEMORY,
        "torch.Tensor.__reduce_ex__": _MEMORY,
    },
    "weight": {
        **ALWAYS,
        "torch.Tensor.__cuda_array_interface__.__get__": _GPU_ONLY,
        "torch.Tensor.name.__get__": "is the name of the table",
        **{
            f"torch.Tensor.{name}": "is there for tensors alone, and Python's own error says so"
            for name in (
                *("__array__", "__array_wrap__", "__div__", "__dlpack__", "__dlpack_device__", "__long__"),
                *("__nonzero__", "__setstate__"),
            )
        },
        **{
            f"torch.Tensor.{name}": "is that of the object: test_dist_tensor.py and test_freezing.py have the calls"
            for name in ("__deepcopy__", "__eq__", "__ne__", "__reduce_ex__", "requires_grad_")
        },
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    return {}


@pytest.mark.parametrize("subject", overridable.SUBJECTS)
def test_every_function_does_as_over_a_matrix_or_is_refused(
    subject: str, found: dict[str, dict[str, str]], table_name: Callable[[], str]
) -> None:
    outcomes = found[subject] = overridable.outcomes(subject, table_name)
    others = {name: each for name, each in outcomes.items() if each not in ("equal", "refused")}
    assert set(others) == set(EXPLAINED[subject]), others
    assert len(outcomes) > 1000


def test_most_functions_are_tried_with_their_arguments() -> None:
    assert len(overridable.functions()) > 1350
    assert len(overridable.arguments()) > 1050


def test_the_page_has_what_works(found: dict[str, dict[str, str]], table_name: Callable[[], str]) -> None:
    for subject in overridable.SUBJECTS:
        if subject not in found:  # Another process runs the other tests.
            found[subject] = overridable.outcomes(subject, table_name)
    _, rest = overridable.PAGE.read_text(encoding="utf-8").split(overridable.BEGIN)
    in_order = {subject: found[subject] for subject in overridable.SUBJECTS}
    assert rest.split(overridable.END)[0] == overridable.page(in_order), "python tests/python/overridable.py writes it"


# Torch lets no type override these, so the attribute of a stand-in's class does, or they are harmless.
NOT_OVERRIDDEN = [
    "new_zeros",
    "new_ones",
    "new_tensor",
    "new_empty",
    "stride",
    "to_sparse_csr",
    "_lazy_clone",
    "_neg_view",
]


@pytest.mark.parametrize("method", NOT_OVERRIDDEN)
def test_methods_that_torch_does_not_list_are_refused_too(method: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    side = overridable.Side(name)
    for subject in (side.parameter, side.parameter.data, side.parameter.grad):
        if method == "stride":
            assert subject.stride() == torch.empty(overridable.SIZE, overridable.SIZE).stride()
            continue
        with pytest.raises((RuntimeError, AttributeError), match=re.escape(f'"{name}"')):
            getattr(subject, method)(*([(1,)] if method.startswith("new_") else []))
