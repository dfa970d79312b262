"""Tests of training runs."""
