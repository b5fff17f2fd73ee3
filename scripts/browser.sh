#!/bin/sh
# Chromium and its driver, which the tests of the report open it in: installed where Debian's packages can be, that is
# by root. Elsewhere those tests are skipped, and this says so; it never fails.
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo 'installing chromium and chromium-driver (Debian), for the tests of the report'
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; } >/dev/null 2>&1 && exit 0
fi
echo 'no chromium and chromedriver here: the tests that open the report in a browser are skipped' >&2
exit 0
