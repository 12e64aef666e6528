//! The requested display of an instance.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::fields::{Fields, ValidationFindings};
use crate::object::string_enum;
use crate::{Error, Result};

/// The maximum video memory, in kibibytes.
pub const MAX_VIDEO_MEMORY_KB: u64 = 4 * 1024 * 1024;

string_enum! {
    /// The remote display protocol.
    Vdi {
        Vnc = "vnc",
        Spice = "spice",
        /// SPICE with several concurrent viewers.
        SpiceConcurrent = "spiceconcurrent",
        /// SPICE with a verbose log.
        SpiceDebug = "spicedebug",
    }
}

/// The requested display of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VideoSpec {
    /// The model of the video card, such as `cirrus`.
    pub model: String,
    /// In kibibytes.
    pub memory: u64,
    /// The remote display protocol.
    pub vdi: Vdi,
}

impl Default for VideoSpec {
    fn default() -> Self {
        Self { model: "cirrus".into(), memory: 16384, vdi: Vdi::Spice }
    }
}

/// Parses the display of an instance, which has two keys: released clients send `video`, the specification names
/// `videospec`.
pub fn parse_video(
    video: Option<&Value>,
    videospec: Option<&Value>,
    findings: &mut ValidationFindings,
) -> Result<VideoSpec> {
    let video = video.map(|value| parse_display(value, "video", findings)).transpose()?.flatten();
    let videospec = videospec.map(|value| parse_display(value, "videospec", findings)).transpose()?.flatten();
    match (video, videospec) {
        (Some(video), Some(videospec)) if video != videospec => {
            Err(Error::Invalid("videospec: differs from video, send only one of them".into()))
        }
        (Some(spec), _) | (None, Some(spec)) => Ok(spec),
        (None, None) => Ok(VideoSpec::default()),
    }
}

/// Returns `None` for null and an empty object.
fn parse_display(value: &Value, path: &str, findings: &mut ValidationFindings) -> Result<Option<VideoSpec>> {
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
    let vdi = fields.string_enum("vdi", fields.text("vdi")?, Vdi::ALL, Vdi::as_str)?.unwrap_or(Vdi::Spice);
    Ok(Some(VideoSpec { model, memory, vdi }))
}
