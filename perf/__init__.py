"""Measuring the ladder: the one timer, the report and what it draws."""
