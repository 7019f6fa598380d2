"""The configuration: a strict schema, one file a group of YAML sections, and its loading. Imports no torch."""
