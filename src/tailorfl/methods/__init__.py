"""The methods, one file per method or family. Importing the package registers every method of the folder."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
