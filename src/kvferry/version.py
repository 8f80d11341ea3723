"""The version, in one place that loads nothing."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvferry")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"
