"""What tests share. No test imports another test: what two of them need is here."""
