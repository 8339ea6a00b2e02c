"""Commands that nothing else imports."""
