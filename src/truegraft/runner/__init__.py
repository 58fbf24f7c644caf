"""Executes step plans on a device."""
