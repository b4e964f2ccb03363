"""Classes whose making `torch.fx` records, that TorchScript compiles, and that pickles name by their public name."""

import copyreg
import pkgutil
from collections.abc import Callable
from typing import Any

from torch.fx import Proxy, ProxyableClassMeta  # pyright: ignore[reportPrivateImportUsage]


class Proxyable(ProxyableClassMeta):
    """The type of such a class. Objects that are made of nothing traced are made without a look at the tracer."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)


def _by_public_name(cls: type) -> tuple[Callable[[str], Any], tuple[str]]:
    # TorchScript needs the module that a class is written in, and a pickle must not name it.
    return pkgutil.resolve_name, (f"recstore_ops:{cls.__name__}",)


copyreg.pickle(Proxyable, _by_public_name)  # type: ignore[arg-type]
