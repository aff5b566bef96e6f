"""The long-context certificate, its self-test, and what can be done with it afterwards."""
