"""What tests share: launches, hosts, pages; no test is here."""
