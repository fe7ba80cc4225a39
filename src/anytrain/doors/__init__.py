"""What people hold."""
