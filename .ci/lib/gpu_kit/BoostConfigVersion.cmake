# Whatever is asked for: farandole was built with these very headers where the kit was made.
set(PACKAGE_VERSION ${PACKAGE_FIND_VERSION})
set(PACKAGE_VERSION_COMPATIBLE TRUE)
