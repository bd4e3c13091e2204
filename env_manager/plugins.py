"""Names in settings that bring their own module: "module:name" imports the module, which registers the name."""

from __future__ import annotations

import importlib

from webshop_env.errors import ShopGymError


def import_plugin(name: str, *, setting: str) -> str:
    """The name alone, after its module was imported where it has one.

    Args:
        name: "summary" or "my_module:summary", as Gymnasium writes its ids.
        setting: Whose value it is, for the error.

    Raises:
        ShopGymError: There is no such module on the Python path, or none of those that it imports.
    """
    module, colon, bare_name = name.partition(":")
    if not colon:
        return name
    if not module or not bare_name or module.startswith("."):
        raise ShopGymError(f"{setting}: {name!r} is no name with its module, such as 'my_module:name'")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise ShopGymError(
                f"{setting}: {name!r}: the module {module!r} was found, but {error.name!r}, which is imported with it, "
                f"was not; install {error.name.partition('.')[0]!r} or take the import out"
            ) from None
        raise ShopGymError(
            f"{setting}: {name!r} wants the module {module!r} ({error}); "
            "install it or put its directory into PYTHONPATH"
        ) from None
    return bare_name
