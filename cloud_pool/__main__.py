"""`python -m cloud_pool --config FILE`"""

from __future__ import annotations

from tidegate.runtime.settled_imports import import_structlog, settled_imports

with settled_imports():
    import_structlog()
    from cloud_pool.cli import pool

if __name__ == "__main__":
    pool(prog_name="python -m cloud_pool")
