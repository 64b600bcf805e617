#!/usr/bin/env bash
# Builds the images' base from Debian packages, without an image registry: Python, certificates and the libraries that
# wheels need, extracted and not installed, so that there is no shell, no package manager and no Perl in it.
#
#   deploy/containers/base.sh base.tar [SUITE]         a root file system as a tar archive
#   podman import base.tar localhost/tidegate-base     or: buildah, docker import
#
# Needs mmdebstrap (Debian: apt install mmdebstrap), and root or user namespaces. MIRROR names another Debian mirror.
# Packages are recorded in /var/lib/dpkg/status.d, where scanners of images look.
set -euo pipefail
into=${1:?usage: base.sh FILE.tar [SUITE]}
suite=${2:-bookworm}
# libstdc++6: gRPC, ONNX Runtime and PyTorch. tzdata is not in it: all that is logged or signed is UTC.
packages=python3-minimal,python3,ca-certificates,base-files,netbase,libc6,libc-bin,libstdc++6,libgcc-s1

record='set -eu; cd "$1"; mkdir -p var/lib/dpkg/status.d
for deb in var/cache/apt/archives/*.deb; do dpkg-deb -f "$deb" >"var/lib/dpkg/status.d/$(dpkg-deb -f "$deb" Package)"; done'
# What the packages would do themselves when installed: the linker's cache, the bundle of certificates, an account.
finish='set -eu; cd "$1"
mkdir -p etc/ssl/certs tmp run var/lib/tidegate var/tmp etc/tidegate
cat usr/share/ca-certificates/mozilla/*.crt >etc/ssl/certs/ca-certificates.crt
printf "root:x:0:0:root:/nonexistent:/nonexistent\ntidegate:x:65532:65532:tidegate:/var/lib/tidegate:/nonexistent\n" >etc/passwd
printf "root:x:0:\ntidegate:x:65532:\n" >etc/group
printf "hosts: files dns\n" >etc/nsswitch.conf
: >etc/hostname; : >etc/resolv.conf  # which would be those of the machine that builds
chmod 1777 tmp var/tmp; chown 65532:65532 var/lib/tidegate
ldconfig -r .
# Of the programs that come along, Python is the one that is needed; dpkg, tar and scripts in Perl are not.
find usr/bin usr/sbin -mindepth 1 ! -name "python3*" ! -name ld.so ! -name ldconfig -delete
rm -rf usr/share/doc usr/share/man usr/share/locale usr/share/lintian usr/share/info usr/share/bug \
  usr/share/perl5 usr/share/gcc usr/share/gdb usr/share/zoneinfo usr/lib/python3/dist-packages/* \
  usr/lib/*/gconv usr/lib/*/perl-base
find usr -name __pycache__ -type d -prune -exec rm -rf {} +'

exec mmdebstrap --variant=extract --format=tar --include="$packages" \
  --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
  --aptopt='Apt::Install-Recommends "false"' \
  --extract-hook="$record" --extract-hook="$finish" \
  "$suite" "$into" ${MIRROR:+"$MIRROR"}
