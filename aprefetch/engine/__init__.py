"""Requests, scheduling, the step driver, sampling."""
