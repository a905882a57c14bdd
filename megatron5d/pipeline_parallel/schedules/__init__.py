"""One file for each family of schedules; every function with `@schedule` is found by its name."""
