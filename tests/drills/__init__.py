"""Tests in which something fails: processes die, disks fill up, machines disappear."""
