"""The rules, a file per family of operators; importing the package fills the table."""

from importlib import import_module
from pkgutil import iter_modules

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
