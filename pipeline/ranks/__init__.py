"""One lane in this process: what moves between ranks, who agrees on what, who notices a failure."""
