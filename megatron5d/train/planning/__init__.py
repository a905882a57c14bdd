"""What a run would take, asked before it starts: its memory, the time of a step, and which layouts are the best."""
