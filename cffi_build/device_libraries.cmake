# What ggml's package leaves out for its static libraries. A module may have undefined symbols, so the link would succeed
# and the import fail.
if(GGML_CUDA AND NOT GGML_STATIC)
    find_package(CUDAToolkit REQUIRED)
    set_property(TARGET ggml::ggml-cuda APPEND PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart CUDA::cublas)
endif()
