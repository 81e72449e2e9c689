"""The journal, made readable for people. Pure; for commands and services."""
