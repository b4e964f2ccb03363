"""An open table of the store, and checks that all callers share."""
