"""The one place that names the version: the package, its rows and the build all read it here."""

__version__ = "0.3.0"
