#!/bin/sh -eu
# Written by `penstock deploy compose`. Makes what is missing in secrets/; what is there stays as it is.
# The folder is closed to other users; the files are readable, because containers have users of their own.
umask 022
mkdir -p secrets
chmod 700 secrets
cd secrets
random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
[ -e redis-password ] || random >redis-password
[ -e postgres-password ] || random >postgres-password
[ -e fleet-secret ] || random >fleet-secret
[ -e metrics-key ] || : >metrics-key # a key with the scope metrics, once there is one
printf 'redis://:%s@redis:6379/0' "$(cat redis-password)" >redis-url
printf 'postgresql://penstock:%s@postgres:5432/penstock' "$(cat postgres-password)" >store-url
