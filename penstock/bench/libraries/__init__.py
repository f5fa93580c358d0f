"""What we wrote ourselves beside the library that we would use otherwise."""
