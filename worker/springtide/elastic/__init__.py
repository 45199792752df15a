"""Keep a script training while members come and go: loops, steps, generations, recovery and the exit."""
