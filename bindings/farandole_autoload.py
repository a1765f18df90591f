"""Registers the backend name with torch; named by the entry points, so it imports the standard library only."""
