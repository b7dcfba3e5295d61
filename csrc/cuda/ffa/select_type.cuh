// A type by a condition (there is no <type_traits> under NVRTC).
#pragma once

template <bool kFirst, class First, class Second> struct SelectType {
    using type = First;
};
template <class First, class Second> struct SelectType<false, First, Second> {
    using type = Second;
};
