//! The signature algorithms of identity tokens.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ECDSA_P521_SHA512_FIXED, EcdsaVerificationAlgorithm,
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512,
    RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters,
};

/// An allowed signature algorithm. Algorithms with a shared secret and `none` are not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    Es512,
}

/// The type of key that an algorithm requires.
pub(super) enum KeyType {
    Rsa(&'static RsaParameters),
    Ec { curve: &'static str, coordinate_bytes: usize, verification: &'static EcdsaVerificationAlgorithm },
}

impl Algorithm {
    pub(super) const ALL: [(&str, Self); 9] = [
        ("RS256", Self::Rs256),
        ("RS384", Self::Rs384),
        ("RS512", Self::Rs512),
        ("PS256", Self::Ps256),
        ("PS384", Self::Ps384),
        ("PS512", Self::Ps512),
        ("ES256", Self::Es256),
        ("ES384", Self::Es384),
        ("ES512", Self::Es512),
    ];

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, algorithm)| *algorithm)
    }

    pub(super) fn key_type(self) -> KeyType {
        let ec =
            |curve, coordinate_bytes, verification| KeyType::Ec { curve, coordinate_bytes, verification };
        match self {
            Self::Rs256 => KeyType::Rsa(&RSA_PKCS1_2048_8192_SHA256),
            Self::Rs384 => KeyType::Rsa(&RSA_PKCS1_2048_8192_SHA384),
            Self::Rs512 => KeyType::Rsa(&RSA_PKCS1_2048_8192_SHA512),
            Self::Ps256 => KeyType::Rsa(&RSA_PSS_2048_8192_SHA256),
            Self::Ps384 => KeyType::Rsa(&RSA_PSS_2048_8192_SHA384),
            Self::Ps512 => KeyType::Rsa(&RSA_PSS_2048_8192_SHA512),
            Self::Es256 => ec("P-256", 32, &ECDSA_P256_SHA256_FIXED),
            Self::Es384 => ec("P-384", 48, &ECDSA_P384_SHA384_FIXED),
            Self::Es512 => ec("P-521", 66, &ECDSA_P521_SHA512_FIXED),
        }
    }
}
