"""The YAML of the commands: it only names choices; defaults and documentation live in the dataclasses beside the classes."""
