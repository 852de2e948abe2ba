"""Precision and checkpoint plugins.

Lightning is imported before any module of this package: its import registers the plugins (see the package's
``__init__``), which would otherwise happen in the middle of importing one of them.
"""

import lightning  # noqa: F401
