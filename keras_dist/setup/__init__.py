"""From the arguments of one call to what this rank is going to do."""
