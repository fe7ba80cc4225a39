"""What a run leaves behind for people to look at: tracked values and profiles."""
