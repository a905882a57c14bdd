"""One file for each family of schedules; the registry finds every function with `@schedule`."""
