//! The keys that an issuer publishes (a JWK set), and whether one of them signed a token.
//!
//! What may verify what: the token names an algorithm and a key id. A key is good for a token if it has that id, is made
//! for signatures, is of the algorithm's kind and curve, and names no other algorithm. A token without a key id is
//! verified if exactly one key is good for its algorithm. Members of a set that are no such keys are passed over.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ECDSA_P521_SHA512_FIXED, EcdsaVerificationAlgorithm,
    ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512,
    RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters,
    RsaPublicKeyComponents,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde_json::Value;

use super::token::Token;

/// Members of a set that are looked at; a set with more is refused.
const MOST_KEYS: usize = 100;
/// Sizes of an RSA key, in bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;
/// Longest exponent of an RSA key, in bytes: more costs time and gives nothing.
const LONGEST_EXPONENT: usize = 4;

/// How a token may be signed. What takes a shared secret is not among it, nor is `none`.
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

/// What an algorithm takes.
enum Kind {
    Rsa(&'static RsaParameters),
    Curve { name: &'static str, coordinate: usize, check: &'static EcdsaVerificationAlgorithm },
}

impl Algorithm {
    const ALL: [(&str, Self); 9] = [
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

    pub(super) fn named(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, algorithm)| *algorithm)
    }

    fn kind(self) -> Kind {
        let curve = |name, coordinate, check| Kind::Curve { name, coordinate, check };
        match self {
            Self::Rs256 => Kind::Rsa(&RSA_PKCS1_2048_8192_SHA256),
            Self::Rs384 => Kind::Rsa(&RSA_PKCS1_2048_8192_SHA384),
            Self::Rs512 => Kind::Rsa(&RSA_PKCS1_2048_8192_SHA512),
            Self::Ps256 => Kind::Rsa(&RSA_PSS_2048_8192_SHA256),
            Self::Ps384 => Kind::Rsa(&RSA_PSS_2048_8192_SHA384),
            Self::Ps512 => Kind::Rsa(&RSA_PSS_2048_8192_SHA512),
            Self::Es256 => curve("P-256", 32, &ECDSA_P256_SHA256_FIXED),
            Self::Es384 => curve("P-384", 48, &ECDSA_P384_SHA384_FIXED),
            Self::Es512 => curve("P-521", 66, &ECDSA_P521_SHA512_FIXED),
        }
    }
}

/// What a set of keys says of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Signed,
    /// Not signed by a key of this set, and no later set is worth asking for.
    Refused(&'static str),
    /// The key is not in this set; it may be in a newer one.
    Unknown,
}

#[derive(Debug)]
struct Key {
    id: Option<String>,
    /// The key, ready for each algorithm that it is good for.
    ways: Vec<(Algorithm, ParsedPublicKey)>,
}

impl Key {
    fn way(&self, algorithm: Algorithm) -> Option<&ParsedPublicKey> {
        self.ways.iter().find(|(own, _)| *own == algorithm).map(|(_, key)| key)
    }

    /// A member of a set, if it is a key that tokens can be signed with.
    fn read(member: &Value) -> Option<Self> {
        let id = match member.get("kid") {
            None => None,
            Some(id) => Some(id.as_str()?.to_owned()),
        };
        if member.get("use").is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        if let Some(operations) = member.get("key_ops")
            && !operations.as_array()?.iter().any(|operation| operation == "verify")
        {
            return None;
        }
        let own = member.get("alg");
        let fitting = Algorithm::ALL.iter().filter(|(name, _)| own.is_none_or(|own| own == name));
        let ways: Vec<_> =
            fitting.filter_map(|(_, algorithm)| Some((*algorithm, parsed(member, *algorithm)?))).collect();
        (!ways.is_empty()).then_some(Self { id, ways })
    }
}

/// The keys that an issuer publishes.
#[derive(Debug, Default)]
pub struct KeySet(Vec<Key>);

impl KeySet {
    /// Reads a JWK set.
    pub fn read(body: &[u8]) -> Result<Self, &'static str> {
        let set: Value = serde_json::from_slice(body).map_err(|_| "what it answers is not JSON")?;
        let members = set.get("keys").and_then(Value::as_array).ok_or("what it answers is no set of keys")?;
        if members.len() > MOST_KEYS {
            return Err("it has too many keys");
        }
        Ok(Self(members.iter().filter_map(Key::read).collect()))
    }

    /// How many keys there are that tokens can be signed with.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether one of the keys signed a token.
    pub(super) fn verify(&self, token: &Token<'_>) -> Verdict {
        let is_signed =
            |key: &ParsedPublicKey| key.verify_sig(token.signed.as_bytes(), &token.signature).is_ok();
        let Some(id) = &token.key_id else {
            let mut fitting = self.0.iter().filter_map(|key| key.way(token.algorithm));
            return match (fitting.next(), fitting.next()) {
                (Some(_), Some(_)) => Verdict::Refused("it names no key, and several would do"),
                (Some(key), None) if is_signed(key) => Verdict::Signed,
                // Without a name nobody can tell a forged token from one of a new key.
                _ => Verdict::Unknown,
            };
        };
        let mut named = self.0.iter().filter(|key| key.id.as_ref() == Some(id)).peekable();
        if named.peek().is_none() {
            return Verdict::Unknown;
        }
        let mut fitting = named.filter_map(|key| key.way(token.algorithm)).peekable();
        if fitting.peek().is_none() {
            return Verdict::Refused("its algorithm is not that of its key");
        }
        if fitting.any(is_signed) { Verdict::Signed } else { Verdict::Refused("its signature is wrong") }
    }
}

/// A member of a set as a key of an algorithm, if it is one.
fn parsed(member: &Value, algorithm: Algorithm) -> Option<ParsedPublicKey> {
    let text = |name: &str| member.get(name).and_then(Value::as_str);
    let bytes = |name: &str| BASE64.decode(text(name)?).ok();
    match (algorithm.kind(), text("kty")?) {
        (Kind::Rsa(check), "RSA") => {
            let (n, e) = (bytes("n")?, bytes("e")?);
            let (n, e) = (number(&n), number(&e));
            let is_odd = |number: &[u8]| number.last().is_some_and(|byte| byte % 2 == 1);
            let is_sane = RSA_BITS.contains(&bits(n)) && is_odd(n) && is_odd(e) && e != [1];
            if !is_sane || e.len() > LONGEST_EXPONENT {
                return None;
            }
            RsaPublicKeyComponents { n, e }.to_parsed_public_key(check).ok()
        }
        (Kind::Curve { name, coordinate, check }, "EC") if text("crv")? == name => {
            let (x, y) = (bytes("x")?, bytes("y")?);
            if x.len() != coordinate || y.len() != coordinate {
                return None;
            }
            // An uncompressed point.
            ParsedPublicKey::new(check, [&[4], x.as_slice(), y.as_slice()].concat()).ok()
        }
        _ => None,
    }
}

/// A number without the zeros that some write before it.
fn number(bytes: &[u8]) -> &[u8] {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    &bytes[zeros..]
}

fn bits(number: &[u8]) -> usize {
    number.first().map_or(0, |first| number.len() * 8 - first.leading_zeros() as usize)
}
