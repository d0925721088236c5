# find_package(texvlm): the target texvlm::texvlm, for C++ programs beside LibTorch (find_package(Torch) comes with it).
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(TEXVLM_PACKAGE "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT EXISTS "${TEXVLM_PACKAGE}/lib/libtexvlm.so")
  set(texvlm_FOUND FALSE)
  set(texvlm_NOT_FOUND_MESSAGE "${TEXVLM_PACKAGE}/lib holds no libtexvlm.so: build texvlm first (pip install --no-build-isolation .)")
  return()
endif()

if(NOT TARGET texvlm::texvlm)
  add_library(texvlm::texvlm SHARED IMPORTED)
  set_target_properties(texvlm::texvlm PROPERTIES
    IMPORTED_LOCATION "${TEXVLM_PACKAGE}/lib/libtexvlm.so"
    IMPORTED_SONAME libtexvlm.so
    INTERFACE_INCLUDE_DIRECTORIES "${TEXVLM_PACKAGE}/include"
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}"
    # The ops register themselves when the library is loaded, though no symbol of it is named; its OpenMP is the one of LibTorch.
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed,${TEXVLM_PACKAGE}/lib/libtexvlm.so,--as-needed,--allow-shlib-undefined")
endif()
