# generated/*_hash.h in the build tree: digests of sources.

# epiloq_hash(<variable> <path>...): a digest of these files' names and contents; a change configures anew.
function(epiloq_hash variable)
  set(digests "")
  foreach(path ${ARGN})
    file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${path} digest)
    string(APPEND digests "${path} ${digest}\n")
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
  string(SHA256 digest "${digests}")
  string(SUBSTRING ${digest} 0 12 digest)
  set(${variable} ${digest} PARENT_SCOPE)
endfunction()

# The kernels and their tables, for which tuned choices hold.
file(GLOB_RECURSE paths RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}
  src/epilogue/* src/kernels/* src/problems/* src/dispatch/*tables.h src/dispatch/*.in src/dispatch/*CMakeLists.txt)
epiloq_hash(kernel_hash ${paths})

# Whatever libepiloq and _core are compiled from: each holds it, and _core refuses a library that holds another.
file(GLOB_RECURSE paths RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} include/* src/*)
epiloq_hash(source_hash CMakeLists.txt ${paths})

# The functions that the Python package expects of _core: `import epiloq` refuses a _core that was built for others.
file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/python/epiloq/_core.pyi interface_hash)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS python/epiloq/_core.pyi)

file(CONFIGURE OUTPUT generated/kernel_hash.h CONTENT "#pragma once\n#define EPILOQ_KERNEL_HASH \"@kernel_hash@\"\n" @ONLY)
file(CONFIGURE OUTPUT generated/source_hash.h CONTENT "#pragma once\n#define EPILOQ_SOURCE_HASH \"@source_hash@\"\n" @ONLY)
file(CONFIGURE OUTPUT generated/interface_hash.h
     CONTENT "#pragma once\n#define EPILOQ_INTERFACE_HASH \"@interface_hash@\"\n" @ONLY)
