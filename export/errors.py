"""How an export ends when it cannot be done."""

from __future__ import annotations


class ExportFailed(Exception):
    """Why there is no export, in one line."""
