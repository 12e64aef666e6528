//! Screens as callers ask for them.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::fields::{Fields, ValidationFindings};
use crate::object::string_enum;
use crate::{Error, Result};

/// The largest memory of a screen, in kibibytes.
pub const MAX_VIDEO_MEMORY_KB: u64 = 4 * 1024 * 1024;

string_enum! {
    /// How a screen is reached.
    Vdi {
        Vnc = "vnc",
        Spice = "spice",
        /// Several viewers at once.
        SpiceConcurrent = "spiceconcurrent",
        /// With a talkative log.
        SpiceDebug = "spicedebug",
    }
}

/// A screen as a caller asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VideoSpec {
    pub model: String,
    /// In kibibytes.
    pub memory: u64,
    pub vdi: Vdi,
}

impl Default for VideoSpec {
    fn default() -> Self {
        Self { model: "cirrus".into(), memory: 16384, vdi: Vdi::Spice }
    }
}

/// Reads the screen of an instance, which has two keys: `video` is what released clients send, `videospec` what the
/// specification calls it.
pub fn parse_video(
    video: Option<&Value>,
    videospec: Option<&Value>,
    findings: &mut ValidationFindings,
) -> Result<VideoSpec> {
    let video = video.map(|value| screen(value, "video", findings)).transpose()?.flatten();
    let videospec = videospec.map(|value| screen(value, "videospec", findings)).transpose()?.flatten();
    match (video, videospec) {
        (Some(video), Some(videospec)) if video != videospec => {
            Err(Error::Invalid("videospec: differs from video, send only one of them".into()))
        }
        (Some(spec), _) | (None, Some(spec)) => Ok(spec),
        (None, None) => Ok(VideoSpec::default()),
    }
}

/// Nothing when nothing was said.
fn screen(value: &Value, path: &str, findings: &mut ValidationFindings) -> Result<Option<VideoSpec>> {
    let values = match value {
        Value::Null => return Ok(None),
        Value::Object(values) if values.is_empty() => return Ok(None),
        Value::Object(values) => values,
        _ => return Err(Error::Invalid(format!("{path}: Not a valid mapping type."))),
    };
    let fields = Fields::new(path, values, &["model", "memory", "vdi"], findings)?;
    let missing = |key: &str| Error::Invalid(format!("video specification requires \"{key}\""));
    let model = fields.model("model", fields.text("model")?)?.ok_or_else(|| missing("model"))?;
    let memory = fields.count("memory", MAX_VIDEO_MEMORY_KB)?.ok_or_else(|| missing("memory"))?;
    let vdi = fields.word("vdi", fields.text("vdi")?, Vdi::ALL, Vdi::as_str)?.unwrap_or(Vdi::Spice);
    Ok(Some(VideoSpec { model, memory, vdi }))
}
