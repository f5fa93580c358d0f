"""What gateway and engine say to each other, and the errors a client may see."""
